"""Numbers with the noun that they count, in tables and lines that a person reads."""


def counted(count: int, noun: str) -> str:
    """Return "1 sample", "2 samples".

    Args:
        count: How many.
        noun: What is counted, in the singular; its plural ends in s.
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
