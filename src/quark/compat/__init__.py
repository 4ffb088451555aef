"""Documented paths: modules made from one table. Nothing else of the package imports what is here."""
