"""End-to-end tests against two real vLLM engines; see README.md in this folder."""
