"""Names that people give: of entries, of layers by patterns, of families of schemes."""
