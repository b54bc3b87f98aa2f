"""How frames travel: one module per transport."""
