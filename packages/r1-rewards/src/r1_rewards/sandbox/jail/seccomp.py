"""A system call filter for programs that only compute and print.

It refuses sockets, fork and exec (threads are allowed), signals to others, tracing, mounts, namespaces, keys, and
system calls of newer kernels.
"""

import ctypes
import errno
import struct

from . import kernel

# Each with its number on x86_64 and on aarch64.
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
lseek 8 62, close 3 57, close_range 436 436, open 2 -, openat 257 56, openat2 437 437, creat 85 -, stat 4 -,
fstat 5 80, lstat 6 -, newfstatat 262 -, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, dup
32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, flock 73 32, ftruncate 77 46, truncate 76
45, fsync 74 82, fdatasync 75 83, fallocate 285 47, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50,
mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2
316 276, readlink 89 -, readlinkat 267 78, symlink 88 -, symlinkat 266 36, link 86 -, linkat 265 37, utimensat
280 88, umask 95 166, statfs 137 43, fstatfs 138 44, sendfile 40 71, copy_file_range 326 285, fadvise64 221 223,
mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227, mincore 27
232, membarrier 324 283,
futex 202 98, futex_waitv 449 449, get_robust_list 274 100, set_robust_list 273 99, set_tid_address 218 96, rseq
334 293, sched_yield 24 124, sched_getaffinity 204 123, gettid 186 178, getpid 39 172, getppid 110 173, exit 60
93, exit_group 231 94, restart_syscall 219 128,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, alarm 37 -, setitimer 38 103, getitimer 36 102,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169,
time 201 -, times 100 153, getrusage 98 165, getrandom 318 278, sysinfo 99 179, uname 63 160, getrlimit 97 163,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, getpgid 121 155, getpgrp 111 -, getsid 124 156, getpriority 140 141, sched_getparam 143 121,
sched_getscheduler 145 120, wait4 61 260, waitid 247 95,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233
21, epoll_wait 232 -, epoll_pwait 281 22, eventfd 284 -, eventfd2 290 19, timerfd_create 283 85, timerfd_settime
286 86, timerfd_gettime 287 87, recvfrom 45 207, sendto 44 206
"""
# These depend on their arguments.
_CLONE, _CLONE3, _IOCTL, _PRLIMIT64, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (302, 261), (53, 199)
_FCNTL = (72, 25)

_CLONE_THREAD = 0x0001_0000
_CLONE_PRIVILEGED = 0x7E02_2000  # new namespaces, and a tracer for the child
_TERMINAL_AND_PIPE_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS … FIOCLEX, FIONBIO, FIONREAD
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ. The others choose who
# gets which signal when a descriptor is ready: F_SETOWN and F_SETSIG together kill any process of the user.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF

_AUDIT_ARCH = (0xC000_003E, 0xC000_00B7)
_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # of 32-bit words, with constants
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_KILL, _ALLOW, _REFUSE = 0x8000_0000, 0x7FFF_0000, 0x0005_0000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def install(*, threads: bool) -> None:
    """Filter this process's system calls for good; `threads` allows threads.

    Call `kernel.drop_privileges` first. Raises OSError if the kernel refuses.
    """
    program = build(threads=threads)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    kernel.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


def build(*, threads: bool) -> list[tuple[int, int, int, int]]:
    """Return the filter as BPF instructions: (code, jump if true, jump if false, constant)."""
    machine = kernel.MACHINE
    program = [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL)]
    program.append((_LOAD, 0, 0, _NUMBER))
    for entry in _ALLOWED.replace("\n", " ").split(","):
        number = entry.split()[1 + machine]
        if number != "-":
            program += [(_JUMP_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ALLOW)]
    if threads:
        mask = _CLONE_THREAD | _CLONE_PRIVILEGED
        program += _where(_CLONE, [_argument(0), (_AND, 0, 0, mask), *_allow_if(_CLONE_THREAD)])
    # As on an old kernel: the C library then uses clone, whose flags can be seen from here.
    program += _where(_CLONE3, [(_RETURN, 0, 0, _REFUSE | errno.ENOSYS)])
    program += _where(_IOCTL, [_argument(1), *_allow_if(*_TERMINAL_AND_PIPE_QUESTIONS)])
    program += _where(_FCNTL, [_argument(1), *_allow_if(*_FCNTL_COMMANDS)])
    program += _where(_PRLIMIT64, [_argument(0), *_allow_if(0)])
    pair = [_argument(0), (_JUMP_EQUAL, 1, 0, _AF_UNIX), _refusal(), _argument(1), (_AND, 0, 0, _SOCK_TYPE)]
    program += _where(_SOCKETPAIR, [*pair, *_allow_if(_SOCK_STREAM)])
    return [*program, _refusal()]


def _where(call: tuple[int, int], body: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    return [(_JUMP_EQUAL, 0, len(body) + 1, call[kernel.MACHINE]), *body, _refusal()]


def _argument(index: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _allow_if(*values: int) -> list[tuple[int, int, int, int]]:
    return [step for value in values for step in ((_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]


def _refusal() -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _REFUSE | errno.EPERM)
