"""How good a representation is: features are extracted once, then every evaluation uses them. Nothing is drawn here."""
