#!/bin/sh
# readme.sh SOURCE: the README quotes docs/example.c, which tests/api builds, word for word.
set -eu
cd "$1"
sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d' | diff -u docs/example.c -
