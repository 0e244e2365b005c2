"""How many examples hypothesis tries of what needs more than others."""

from hypothesis import settings


def examples(most: int) -> int:
    """As many, but under sanitizers, where each costs ten times as much, in proportion to what they leave of others."""
    return max(8, min(most, most * settings().max_examples // 50))
