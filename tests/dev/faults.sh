#!/bin/sh
# faults.sh SOURCE: every test that the tables of reported faults name is there: `suite/name`, `name`
# after one of the same suite, programs, and cases of ./dev manynode.
set -eu
cd "$1"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat tests/*/*.c | sed -n 's/^[ \t]*\(Test\|TEST_EACH_ISA\)(\([a-z0-9_]*\), \([a-z0-9_]*\).*/\2\/\3/p' |
    sort -u >"$work/tests"
test -s "$work/tests"
sed 's/.*\///' "$work/tests" | sort -u >"$work/names"
{
    sed -n '/^| reported/,/^$/p' docs/faults.md docs/fuzzing.md | awk -F'|' '{ print $4 }'
    sed -n '/^## Cases, and the tests/,$p' docs/kernels.md | awk -F'|' 'NF > 3 { print $3 }'
} | sed 's/manynode:.*//' >"$work/cells"
# A name by itself has at least three words, which no program and no file there has.
for what in 'tests [a-z0-9_]*/[a-z0-9_]*' 'names [a-z0-9]*_[a-z0-9]*_[a-z0-9_]*'; do
    grep -o "\`${what#* }\`" "$work/cells" | tr -d '\`' | sort -u >"$work/named"
    test "$(wc -l <"$work/named")" -ge 15
    comm -13 "$work/${what%% *}" "$work/named" >"$work/absent"
    sed 's/^/no such test: /' "$work/absent"
    test ! -s "$work/absent"
done
grep -o 'manynode: .*' docs/faults.md | grep -o '`[a-z0-9]*`' | tr -d '`' | sort -u | while read -r name; do
    test -f "stress/manynode/cases/$name" || { echo "no such case: $name"; exit 1; }
done
