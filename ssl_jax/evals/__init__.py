"""Evaluation of representations. Features are extracted once and shared by all evaluations. Nothing is plotted here."""
