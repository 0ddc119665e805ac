"""What a representation is worth."""
