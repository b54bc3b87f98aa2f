"""Guided decoding: answers that match a JSON schema, an expression, choices or a grammar, by llguidance."""
