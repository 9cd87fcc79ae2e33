"""Rules by topic.

A rule is a function of a site and what is known of an image; a new one goes into its topic's RULES.
"""

__all__ = ["building", "device_code", "nodes", "runtimes"]
