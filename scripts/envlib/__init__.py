"""Parts of ``scripts/setup_env.py``: the environments that it makes. Only the standard library is used here."""
