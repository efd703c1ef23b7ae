#!/bin/sh
# probes.sh LIBRARY PAGE: the library has the static probes that the page lists, with as many
# arguments.
set -eu
library=$1 page=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Notes have lines "Provider: numoe", "Name: steal", "Arguments: 4@%eax ...".
readelf -n "$library" | awk '
    $1 == "Provider:" { provider = $2 }
    $1 == "Name:" { name = $2 }
    $1 == "Arguments:" && provider == "numoe" { print name, NF - 1 }' | sort -u >"$work/notes"
# The page has rows "| `steal` | worker, victim | ... |".
sed -n 's/^| `\([a-z_]*\)` | \([a-z_, ]*\) | .*/\1 \2/p' "$page" |
    awk '{ print $1, NF - 1 }' | sort >"$work/page"
test -s "$work/notes"
diff -u "$work/page" "$work/notes"
