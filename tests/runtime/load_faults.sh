#!/usr/bin/env bash
# load_faults.sh NUMOE: load a checkpoint while strace makes system calls fail. Each run must give
# the results of an undisturbed one, or end with one line that says what is wrong; never a signal,
# a hang, or other results. Without strace, or where it may not trace: 77, a skip.
set -uo pipefail
numoe=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
export NUMOE_GPU=off

strace -qq -o /dev/null true 2>/dev/null || {
    echo "skipped: strace is not here, or may not trace"
    exit 77
}
"$numoe" synth --model gpt-oss-20b --layers 1 --experts 3 --seed 1 "$work/model" >/dev/null 2>&1 || {
    echo "no checkpoint could be written"
    exit 1
}
file=$(echo "$work"/model/*.safetensors)

# How files are read: they are in the page cache here, and would not be read past it else.
way=disk
load() {
    timeout 60 "$@" "$numoe" run --json --once --tokens 1 --workers 2 --read $way "$work/model" \
        >"$work/out" 2>"$work/err"
}

digest() {
    sed -n 's/.*"digest": *"\([0-9a-f]*\)".*/\1/p' "$work/out"
}

load env || {
    echo "an undisturbed load failed"
    exit 1
}
right=$(digest)

# try NAME STRACE_ARGUMENT...: one disturbed run
try() {
    local name=$1 status errors
    shift
    load strace -f -qq -o "$work/trace" "$@"
    status=$?
    errors=$(grep '^numoe: ' "$work/err" | grep -vc '^numoe: warning: ')
    if ((status == 0)) && [[ $(digest) == "$right" ]]; then
        ((passed++))
    elif ((status > 0 && status < 124 && errors == 1)); then
        ((passed++))
    else
        ((failed++))
        echo "failed: $name: status $status, digest $(digest) where $right is right"
        sed 's/^/    /' "$work/err"
    fi
}

# every CALL WHEN ERRNO...: the call fails with each of them; WHEN as strace has it: 1, 2, 1+ ...
every() {
    local call=$1 when=$2 code
    shift 2
    for code in "$@"; do
        try "$call $code $when" -e "trace=$call" -e "inject=${call%%,*}:error=$code:when=$when" \
            "${also[@]}"
    done
}

also=()
every io_uring_setup 1 EFAULT EINVAL EMFILE ENFILE ENOMEM EPERM ENOSYS
for when in 1 3 1+; do
    every io_uring_enter $when EAGAIN EBADF EBADFD EBUSY EFAULT EINTR EINVAL EIO ENOMEM ENXIO \
        EOPNOTSUPP EPERM
done
for when in 1 2 3 1+; do
    every io_uring_register $when EACCES EBADF EBUSY EFAULT EINVAL EMFILE ENOMEM ENXIO EOPNOTSUPP \
        EPERM
done
# The files alone: headers by read and pread64.
also=(-P "$file")
for when in 1 2 1+; do
    for call in read pread64; do
        every "$call" $when EAGAIN EBADF EFAULT EINTR EINVAL EIO EISDIR EOVERFLOW
        try "$call ends early $when" -e "trace=$call" -e "inject=$call:retval=0:when=$when" "${also[@]}"
    done
done
# No ring: the weights by pread64, which are the later ones.
also=(-e inject=io_uring_setup:error=ENOSYS)
load strace -f -qq -o "$work/trace" -e trace=pread64,io_uring_setup "${also[@]}"
reads=$(grep -c 'pread64(' "$work/trace")
if ! grep -q pread "$work/err" || ((reads < 12)); then
    ((failed++))
    echo "failed: without io_uring the weights were not read by pread64 ($reads calls)"
fi
for when in $((reads / 2)) $((reads - 1)) $((reads / 2))+; do
    every pread64,io_uring_setup $when EAGAIN EBADF EFAULT EINTR EINVAL EIO EISDIR EOVERFLOW EOPNOTSUPP
    try "pread64 ends early $when" -e trace=pread64,io_uring_setup \
        -e "inject=pread64:retval=0:when=$when" "${also[@]}"
done
# By plain reads of the workers: as many of them, and the later ones are the weights'.
way=cached
also=()
load strace -f -qq -o "$work/trace" -e trace=pread64,io_uring_setup
reads=$(grep -c 'pread64(' "$work/trace")
if grep -q io_uring_setup "$work/trace" || ((reads < 12)) || [[ $(digest) != "$right" ]]; then
    ((failed++))
    echo "failed: the weights were not read by plain reads ($reads calls)"
fi
for when in $((reads / 2)) $((reads - 1)) $((reads / 2))+; do
    every pread64 $when EAGAIN EBADF EFAULT EINTR EINVAL EIO EISDIR EOVERFLOW
    try "pread64 ends early $when" -e trace=pread64 -e "inject=pread64:retval=0:when=$when"
done
every preadv2 1+ EAGAIN EOPNOTSUPP ENOSYS
way=disk
also=(-P "$file")
for when in 1 2 3 1+; do
    every openat $when EACCES EFAULT EINTR EINVAL EIO EISDIR ELOOP EMFILE ENAMETOOLONG ENFILE \
        ENOENT ENOMEM ENXIO EOVERFLOW EPERM
done
also=()
for when in 1 2 1+; do
    every mbind $when EFAULT EINVAL EIO ENOMEM ENOSYS EPERM
done
# Memory is made resident by madvise, past the page cache on the way.
load strace -f -qq -e trace=madvise -o "$work/trace"
last=$(grep -c MADV_POPULATE_WRITE "$work/trace")
((last > 0)) || {
    ((failed++))
    echo "failed: nothing was made resident by madvise"
}
all=$(grep -c . "$work/trace")
for ((when = 1; when <= all; when++)); do
    every madvise $when EFAULT EHWPOISON EINVAL EIO ENOMEM
done
every madvise 1+ EFAULT EHWPOISON EINVAL EIO ENOMEM
# What the dynamic linker maps is not ours: those behind the ones that `numoe version` needs.
strace -qq -e trace=mmap -o "$work/trace" "$numoe" version >/dev/null 2>&1
first=$(grep -c . "$work/trace")
load strace -qq -e trace=mmap -o "$work/trace"
last=$(grep -c . "$work/trace")
for ((when = first + 1; when <= last; when += 1 + (last - first) / 40)); do
    every mmap $when ENOMEM
done
for code in EACCES EAGAIN EINVAL ENFILE EPERM; do
    every mmap $((first + (last - first) * 2 / 3)) $code
done

echo "$passed passed, $failed failed"
((failed == 0))
