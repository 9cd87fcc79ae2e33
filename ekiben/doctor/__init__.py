"""Will an image run? consult (all questions), findings (answers), rules, image_requirements, machine, preflight (of
a job), record (a site profile).
"""

__all__ = ["consult", "findings", "image_requirements", "machine", "preflight", "record", "rules"]
