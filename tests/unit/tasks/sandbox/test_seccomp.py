"""The filter of system calls, read as the kernel reads it."""

import struct

import pytest

from torchtitan_rl.tasks.sandbox import seccomp

ALLOWED, EPERM, ENOSYS, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def verdict(program, arch, number, first_argument=0):
    """What a program of linux/filter.h returns for a call."""
    data = struct.pack("<IIQ6Q", number, arch, 0, first_argument, 0, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("<HBBI", program))
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_filter_refuses_what_it_names_and_nothing_else(machine):
    program, (arch, numbers) = seccomp.program(machine), seccomp.MACHINES[machine]
    special = {"socket", "clone", "clone3", "prlimit64"}
    for number in range(500):
        name = next((name for name, its in numbers.items() if its == number), None)
        if name not in special:
            assert verdict(program, arch, number) == (ALLOWED if name is None else EPERM), (number, name)
    assert verdict(program, arch, numbers["clone3"]) == ENOSYS
    assert verdict(program, arch, numbers["clone"], 17) == ALLOWED  # SIGCHLD: a fork
    assert verdict(program, arch, numbers["clone"], 17 | 0x10000000) == EPERM  # CLONE_NEWUSER
    assert verdict(program, arch, numbers["prlimit64"], 0) == ALLOWED  # the caller's own
    assert verdict(program, arch, numbers["prlimit64"], 1) == EPERM
    families = {family: verdict(program, arch, numbers["socket"], family) for family in range(46)}
    assert {family for family, answer in families.items() if answer == ALLOWED} == {1, 2, 10, 16}
    assert verdict(program, arch ^ 1, 1) == KILLED and verdict(program, arch, 0x40000000 | 41) == EPERM
