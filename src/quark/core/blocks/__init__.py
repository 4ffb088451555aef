"""Block types: rows of codes that hold their own scales, and the search for these."""
