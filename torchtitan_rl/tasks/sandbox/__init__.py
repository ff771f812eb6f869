"""Places in which commands of agents and tests run: files in, commands, files out, and nothing left behind.

config.py       `SandboxConfig`: which kind, and its limits
sandbox.py      `Sandbox`, the interface of every kind; `Finished`, a command's end
plain.py        kind `none`: a directory and a tree of processes, of the same user
bubblewrap.py   kind `bubblewrap`: namespaces, a read-only root, no network but the gateway
container.py    kinds `docker` and `podman`: a container of an image, no network but the gateway
inside.py       process 1 within bubblewrap and containers
outside.py      the controller's side of process 1
seccomp.py      the system calls that commands do not have there
registry.py     the hosts of a run with several, on which `SandboxConfig.open` opens; room.py chooses one of them
streams.py      connections to the gateway from sandboxes on another host, as messages
"""
