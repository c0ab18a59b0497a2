"""The PMI plugin of srun that starts the MPI library of this Python.

    srun --mpi="$(python -m mntrain.comm.srun_plugin)" ...

prints one word: pmix, pmi2 or cray_shasta. It does not start MPI, so it runs in a batch script.
"""

import sys

from mntrain.checks import launcher
from mntrain.comm import mpi


def main() -> int:
    """Print the plugin. Returns the exit code; the error goes to stderr."""
    try:
        plugin = launcher.srun_plugin(mpi.import_unstarted().Get_library_version())
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        print(
            f"mntrain: no plugin for srun --mpi, with {sys.executable}: {reason}; load the module "
            "of the MPI library, or set MPI_PLUGIN (srun --mpi=list shows the plugins of the site)",
            file=sys.stderr,
        )
        return 2
    print(plugin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
