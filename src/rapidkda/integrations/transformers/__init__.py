"""Hugging Face transformers: run the KDA layers of `glm5_next` and `kimi_linear` models with rapidkda.

    report = accelerate(model)   # in place; print(report) says which layers, which backends and why
    restore(model)               # as it was

Importing this package does not import transformers.
"""

from .patch import Acceleration, accelerate, restore

__all__ = ["Acceleration", "accelerate", "restore"]
