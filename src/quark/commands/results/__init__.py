"""What is printed: lines, tables and pages that several commands share."""
