"""The system calls that commands in bubblewrap and containers do not have, as a program for the kernel's filter.

Namespaces leave the whole kernel in reach. What reaches another process, takes memory that no limit counts, speaks to
something that has no namespace, or has often been the way out of a container is refused with EPERM:
- `ptrace`, `process_vm_*`, `prlimit64` of another than the caller: another process, such as process 1;
- `memfd_create`, `shmget`, `msgget`, `semget`: memory beside the limits;
- `unshare`, `setns`, `mount` and its likes, `clone` with a namespace's flag: a namespace in which a user is root;
- `keyctl`, `bpf`, `perf_event_open`, `userfaultfd`, `io_uring_setup` ...: parts of the kernel that no task needs;
- `socket` of other families than Unix, IPv4, IPv6 and netlink: vsock, for one, reaches the host of a virtual machine.
`clone3` is answered ENOSYS, as its flags cannot be read here; C libraries then call `clone`.

Numbers: linux/arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; the program's form:
linux/filter.h, linux/seccomp.h.
"""

from __future__ import annotations

import errno
import platform
import struct

__all__ = ["MACHINES", "program"]

_REFUSED = (
    "ptrace process_vm_readv process_vm_writev memfd_create memfd_secret shmget msgget semget unshare setns mount "
    "umount2 pivot_root chroot fsopen fsmount open_tree move_mount mount_setattr add_key request_key keyctl bpf "
    "perf_event_open userfaultfd io_uring_setup kexec_load kexec_file_load init_module finit_module delete_module "
    "open_by_handle_at name_to_handle_at quotactl acct swapon swapoff reboot syslog"
).split()

_X86_64 = dict(
    socket=41, clone=56, clone3=435, ptrace=101, process_vm_readv=310, process_vm_writev=311, memfd_create=319,
    memfd_secret=447, shmget=29, msgget=68, semget=64, unshare=272, setns=308, mount=165, umount2=166, pivot_root=155,
    chroot=161, fsopen=430, fsmount=432, open_tree=428, move_mount=429, mount_setattr=442, add_key=248, request_key=249,
    keyctl=250, bpf=321, perf_event_open=298, userfaultfd=323, io_uring_setup=425, kexec_load=246, kexec_file_load=320,
    init_module=175, finit_module=313, delete_module=176, open_by_handle_at=304, name_to_handle_at=303, quotactl=179,
    acct=163, swapon=167, swapoff=168, reboot=169, syslog=103, prlimit64=302,
)  # fmt: skip
_AARCH64 = dict(
    socket=198, clone=220, clone3=435, ptrace=117, process_vm_readv=270, process_vm_writev=271, memfd_create=279,
    memfd_secret=447, shmget=194, msgget=186, semget=190, unshare=97, setns=268, mount=40, umount2=39, pivot_root=41,
    chroot=51, fsopen=430, fsmount=432, open_tree=428, move_mount=429, mount_setattr=442, add_key=217, request_key=218,
    keyctl=219, bpf=280, perf_event_open=241, userfaultfd=282, io_uring_setup=425, kexec_load=104, kexec_file_load=294,
    init_module=105, finit_module=273, delete_module=106, open_by_handle_at=265, name_to_handle_at=264, quotactl=60,
    acct=89, swapon=224, swapoff=225, reboot=142, syslog=116, prlimit64=261,
)  # fmt: skip
MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
"""Machine -> AUDIT_ARCH of linux/audit.h, and numbers of system calls by name."""

_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_NAMESPACES = 0x7E020000  # every CLONE_NEW* that clone takes
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, of a little-endian machine
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000
"""Bit of the numbers of x32, a second list of system calls on x86_64."""


def program(machine: str | None = None) -> bytes:
    """The filter of this machine, or of `machine`: instructions of 8 bytes."""
    arch, numbers = MACHINES[machine or platform.machine()]
    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    lines = [
        _line(_LOAD, _ARCH),
        _line(_IF_EQUAL, arch, 1, 0),
        _line(_RETURN, _KILL_PROCESS),
        _line(_LOAD, _NUMBER),
        _line(_IF_AT_LEAST, _X32, 0, 1),
        _line(_RETURN, refuse),
        _line(_IF_EQUAL, numbers["clone3"], 0, 1),
        _line(_RETURN, absent),
    ]
    for name in _REFUSED:
        lines += [_line(_IF_EQUAL, numbers[name], 0, 1), _line(_RETURN, refuse)]
    lines += [
        _line(_IF_EQUAL, numbers["prlimit64"], 0, 4),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_IF_EQUAL, 0, 1, 0),
        _line(_RETURN, refuse),
        _line(_RETURN, _ALLOW),
        _line(_IF_EQUAL, numbers["clone"], 0, 4),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_IF_ANY_BIT, _NAMESPACES, 0, 1),
        _line(_RETURN, refuse),
        _line(_RETURN, _ALLOW),
        _line(_IF_EQUAL, numbers["socket"], 0, 2 + len(_FAMILIES)),
        _line(_LOAD, _FIRST_ARGUMENT),
    ]
    # From the comparison with family i, the last line of the program is len(_FAMILIES) - i lines further on.
    lines += [_line(_IF_EQUAL, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES)]
    lines += [_line(_RETURN, refuse), _line(_RETURN, _ALLOW)]
    return b"".join(lines)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`; the jumps count from the next line."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
