"""Names that are there because documented and earlier spellings work. Only the tables of public names import them."""
