#!/bin/sh
# exports.sh LIBRARY SOURCE: the library exports what numoe.map names, that is every function that
# the installed headers declare, and nothing else, those of the headers that may change under the
# library's own version; its SONAME is libnumoe.so.0.
set -eu
library=$1 runtime=$2/runtime gpu=$2/gpu/numoe_gpu.h kernels=$2/kernels/numoe_kernels.h
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
    sort >"$work/exported"
sed -n 's/^ *\(numoe_[a-z0-9_]*\);$/\1/p' "$runtime/numoe.map" | sort >"$work/mapped"
# A declaration begins in the first column and is not a typedef.
declared() {
    grep -h '^[a-z]' "$@" | grep -v '^static' |
        sed -n 's/^[a-z][^(]*[ *]\(numoe_[a-z0-9_]*\)(.*/\1/p'
}
declared "$runtime/numoe.h" "$runtime/base/numoe_base.h" "$runtime/base/numoe_types.h" \
    "$gpu" "$kernels" >"$work/all"
grep -h '^typedef' "$runtime/numoe.h" "$runtime/base/numoe_base.h" "$gpu" "$kernels" |
    sed -n 's/.*\(numoe_[a-z0-9_]*\)(.*/\1/p' >"$work/types" || true
grep -vxFf "$work/types" "$work/all" | sort >"$work/declared"

test -s "$work/mapped"
diff -u "$work/declared" "$work/mapped"
diff -u "$work/mapped" "$work/exported"
version=$(basename "$(readlink -f "$library")" | sed 's/.*\.so\.//')
nm -D --defined-only "$library" | sed -n "s/.* \(numoe_[a-z0-9_]*\)@@NUMOE_GPU_$version\$/\1/p" | sort \
    >"$work/changing"
declared "$gpu" "$kernels" | grep -vxFf "$work/types" | sort >"$work/of_parts"
diff -u "$work/of_parts" "$work/changing"
readelf -d "$library" | grep -q 'SONAME.*\[libnumoe\.so\.0\]'
