"""scripts/gpu-check: proves the backend on a machine with an NVIDIA GPU that has no network and is at hand for minutes.

    pack       parts: what the machine needs, cut into pieces
    install    the pieces to a tree, a backend and a virtual environment
    chunks     commands that are run one after another and recorded
    stages     which these are
    machine, load, behaviour, step     the commands; each prints a JSON object a line
    report     what was found, as a table and as markdown

All but the commands and `pack` need nothing beside Python itself: they run before anything is installed.
"""
