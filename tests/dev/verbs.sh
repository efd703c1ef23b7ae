#!/bin/sh
# verbs.sh SOURCE: ./dev lists its verbs and refuses others.
set -eu
dev=$1/dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$dev" >"$work/list"
for verb in run test fuzz bench manynode bundle sanitize-gpu format lint install clean; do
    grep -q "^  $verb " "$work/list" || { echo "$verb is not listed"; exit 1; }
done
status=0
"$dev" no-such-verb >"$work/out" 2>"$work/err" || status=$?
test "$status" = 2
test ! -s "$work/out"
grep -q no-such-verb "$work/err"
