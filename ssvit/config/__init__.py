"""The machinery of options: their declaration, checks and help. It names no part."""
