"""What exists because documented and earlier spellings work. Only the tables of public names import what is here."""
