"""scripts/gpu-check: proves the backend on a machine with an NVIDIA GPU that has no network and is at hand for minutes.

    pack       parts: what the machine needs, cut into pieces
    install    the pieces to a tree, a backend and a virtual environment
    chunks     commands that are run one after another and recorded
    stages     which these are
    machine, values, memory, captures, shared_memory, step, peer, behaviour     the commands
    serving    a real server with sequences that are compared with ONNX Runtime alone; `models` has the models
    cuda       NVIDIA's driver, called from Python
    report     what was found, as a table and as markdown

The commands print a JSON object a line. Two more are of the program stateful-gpu-bench (tools/gpu-bench). All but the
commands and `pack` need nothing beside Python itself: they run before anything is installed.
"""
