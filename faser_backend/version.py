"""The version of the project; pyproject.toml reads it from here.

Code uses it instead of the installed metadata, so that a checkout reports its own version.
"""

VERSION = "0.2.0"
