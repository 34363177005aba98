"""The version of all of the project, which pyproject.toml reads from here.

Code asks here and not the installed metadata: a checkout on the path says what it is, installed or not.
"""

VERSION = "0.2.0"
