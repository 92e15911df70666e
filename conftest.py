"""Rules for all tests of the workspace."""

pytest_plugins = ["support.skips"]
