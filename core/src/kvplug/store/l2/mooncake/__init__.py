"""The tier `mooncake`: Mooncake Store, memory of many machines behind one master.

`tier` has the tier; `connection` owns Mooncake's client and closes it when nobody is inside; `library` imports it and
bounds its calls; `codes` says what its answers mean; `addresses` knows the hosts; `usage` asks the master's metrics.
"""

from kvplug.store.l2.mooncake.settings import MooncakeSettings
from kvplug.store.l2.mooncake.tier import MooncakeTier

__all__ = ["MooncakeSettings", "MooncakeTier"]
