"""Names of environment variables, for whoever must not import the settings.

Importing pydantic reads the metadata of every installed distribution, and fails where one is broken; `kvplug doctor`
is there to say so.
"""

from __future__ import annotations

__all__ = ["AIBRIX_PREFIXES", "KVPLUG_PREFIX"]

#: What AIBrix's variables begin with.
AIBRIX_PREFIXES = ("AIBRIX_KV_CACHE_OL_", "VLLM_AIBRIX_")
#: What kvplug's variables begin with.
KVPLUG_PREFIX = "KVPLUG_"
