#!/bin/sh
# refusals.sh DIRECTORY: the programs of stress/ refuse what they do not know, at once and with their
# usage, and an answer that cannot be written is an error.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

refuses() {
    status=0
    timeout 20 "$@" >"$work/out" 2>"$work/err" || status=$?
    if [ "$status" != 2 ] || [ -s "$work/out" ] || ! grep -q '^Usage: numoe-' "$work/err"; then
        echo "$*: status $status"
        cat "$work/out" "$work/err"
        exit 1
    fi
}

for program in ceiling fork-join forms place-rate plan-time read-rate row-share; do
    [ -x "$1/numoe-$program" ] || continue
    refuses "$1/numoe-$program" --no-such-option
done
refuses "$1/numoe-forms" fast quick
refuses "$1/numoe-place-rate"
refuses "$1/numoe-place-rate" "$work" 1
refuses "$1/numoe-read-rate"
head -c 100000 /dev/zero >"$work/file"
status=0
"$1/numoe-read-rate" "$work/file" >/dev/full 2>"$work/err" || status=$?
if [ "$status" != 3 ] || ! grep -q 'stdout: the answer could not be written' "$work/err"; then
    echo "a full disk: status $status"
    cat "$work/err"
    exit 1
fi
