"""Import weights of other projects and export in their formats."""
