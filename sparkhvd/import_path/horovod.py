"""The name `horovod` for a rank's subprocesses: `as_horovod` puts this folder on their PYTHONPATH.

Where the name is off, `import horovod` finds what it would find without this file.
"""

import importlib
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _FOLDER]
del sys.modules[__name__]
if os.environ.get("SPARKHVD_AS_HOROVOD") == "1":  # noqa: TID251 - not a setting: it changes what a process imports
    from sparkhvd import as_horovod

    as_horovod.install()
# The import system returns what is now in sys.modules.
importlib.import_module(__name__)
