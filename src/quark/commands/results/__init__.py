"""Lines, tables and pages that several commands print."""
