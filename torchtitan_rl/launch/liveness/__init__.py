"""Who gives a sign of life to whom, how often, who ends what when the signs stop, and what begins again.

    supervisor of --max-restarts, or torchrun's process of rank 0     torchrun's process of another host
         |  ^ file of signs (watchdog)      |  ^                              |  ^
         |  |                               |  +----- store (heartbeats) -----+--+
         v  |                               v                                 v
    controller ----- a byte and its echo (lease) -----> worker of each host (launch.worker)
         |  ^ answers to calls and probes                   |
         v  |                                               v
    trainer ranks, generator replicas, store: started by the workers, or without `--hosts` by the controller

In each pair the first gives the sign, and the second acts when it stops.

controller -> worker: a byte (`lease.Lease`)
    Every 2 s (`lease.EVERY_S`), on a connection that is made again when it ends; a goodbye at the end of the run.
    After 30 s (`lease.SILENT_S`) without a byte the worker kills every process that it has started, and begins anew.
    When another controller attaches, 10 s (`lease.QUIET_S`) are enough, or 4 s (`lease.GONE_S`) since the connection
    ended, or a process of the worker's machine that is gone. The worker then serves the next controller. Nothing of
    the run begins again by that.
worker -> controller: the echo of that byte (`lease.Lease.answers`)
    Looked for when a replica is lost. Without an echo for 8 s (`lease.ANSWERS_S`) the host is lost too.
    `attach.Hosts.await_back` waits 300 s (`JOIN_S`) for another worker at the address; there the replica begins again.
    A host that has joined the run is not waited for: it has left with its replicas.
host's process of a job -> worker -> controller: the seconds that are left (`lease.ask_to_leave`)
    When a scheduler takes a joined host back. The worker says them in each echo, and the controller's
    `joined_hosts.JoinedHosts` ends the host's replicas within that time. Its goodbye then ends the host's process.
host -> host, under torchrun: a count in torchrun's store (`heartbeats.HeartbeatWatch`)
    Every 0.5 s (`heartbeats.BEAT_S`). Rank 0 reads all counts, all other ranks read rank 0's. After 10 s
    (`heartbeats.SILENT_S`), or when a host says that its worker has ended, every host ends its worker, and so the run.
    torchrun's --max-restarts begins all of them again, with `--resume auto`.
controller -> its supervisor: a file (`watchdog`)
    Every 5 s (`watchdog.SIGN_EVERY_S`) or more often, by the controller's event loop. The file says within how many
    seconds the next sign follows: `controller.hang_timeout_s`, and at the start 300 s (`watchdog.START_S`). The
    supervisor, or torchrun's process of rank 0, looks every 1 s (`watchdog.LOOK_EVERY_S`) and kills a controller that
    is overdue. `restarts.run_with_restarts` begins the next attempt from the newest checkpoint, as after every other
    end of the controller that is not for good; torchrun begins all hosts again.
parent -> child: nothing; the kernel sees the parent's end (`environment.end_with_parent`)
    An attempt ends with its supervisor, worker and controller end with torchrun's process of their host.
engine of a replica -> controller: the answer to a probe (`dispatch.repair.Repair.probe`)
    Every `generator.probe_every_s`. Without an answer for `generator.hang_timeout_s` the replica is lost: its processes
    are ended, its requests go to siblings, and a replacement begins on its devices (`ActorLauncher.restart_generator`),
    at most `generator.max_replica_restarts` times within `generator.restart_window_s`.
actor of a host's sandboxes -> controller: what their connections send (`dispatch.remote_sandbox.RemoteHost`)
    Every 1 s (`actors.sandbox_host.COLLECT_S`), or sooner where they send something, as the answer to a call. Without
    an answer for 15 s (`dispatch.remote_sandbox.SILENT_S`), or when its process has died, the host is lost for
    sandboxes: those that are open there end with an error, new ones open on other hosts, and the run goes on.
controller -> actor of a host's sandboxes: that call
    Without one for 60 s (`actors.sandbox_host.SILENT_S`) the actor closes its sandboxes. The worker has killed it by
    then, unless a job started the worker.
rank -> controller: the answer to a call (`dispatch.role_mesh.RoleMesh`)
    While a call waits, the controller looks whether the rank's process is there. On other hosts Monarch does, and takes
    a process for dead after 8 s of silence (`adapters.configure_monarch`). A replica that has died is replaced as
    above. A trainer rank or a store that has died ends the attempt; the supervisor begins the next one.

Two more pairs end no process: a rank that fetches weights gives up a publisher that sends nothing
(`weights.piece_server.SILENT_S`), and readers of a run directory take its status for a sign
(`record.status.HEARTBEAT_S`).
"""

from __future__ import annotations

from torchtitan_rl.environment import seconds_of

__all__ = ["JOIN_S"]

JOIN_S = seconds_of("TORCHTITAN_RL_JOIN_S", 300)
"""Seconds for a host to be there: for all hosts to join a launch by torchrun, and for a lost host to come back. The
hosts of a job start minutes apart, and a host that boots takes minutes."""
