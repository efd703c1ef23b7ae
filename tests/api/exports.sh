#!/bin/sh
# exports.sh LIBRARY RUNTIME_DIRECTORY: the library exports what numoe.map names, that is every
# function that the installed headers declare, and nothing else; its SONAME is libnumoe.so.0.
set -eu
library=$1 runtime=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
    sort >"$work/exported"
sed -n 's/^ *\(numoe_[a-z0-9_]*\);$/\1/p' "$runtime/numoe.map" | sort >"$work/mapped"
# A declaration begins in the first column and is not a typedef.
sed -n 's/^[a-z].*[ *]\(numoe_[a-z0-9_]*\)(.*/\1/p' "$runtime/numoe.h" \
    "$runtime/base/numoe_base.h" "$runtime/base/numoe_types.h" >"$work/all"
grep -h '^typedef' "$runtime/numoe.h" "$runtime/base/numoe_base.h" |
    sed -n 's/.*\(numoe_[a-z0-9_]*\)(.*/\1/p' >"$work/types" || true
grep -vxFf "$work/types" "$work/all" | sort >"$work/declared"

test -s "$work/mapped"
diff -u "$work/declared" "$work/mapped"
diff -u "$work/mapped" "$work/exported"
readelf -d "$library" | grep -q 'SONAME.*\[libnumoe\.so\.0\]'
