"""narwhal-trio: an OpenAI-compatible router for disaggregated LLM inference, on trio."""

from __future__ import annotations

__version__ = "0.1.0"
