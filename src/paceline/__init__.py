"""A data loader for data your model generates itself: actor-learner training in ten lines."""

from paceline._version import __version__

__all__ = ["__version__"]
