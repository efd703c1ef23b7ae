#!/bin/sh
# count_results.sh SOURCE: the sums at the end of ./dev test are right, whatever programs do.
set -eu
awk_file=$1/tests/count_results.awk
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# expect STATUS LINE: what the log in $work/log adds up to.
expect() {
    status=0
    awk -v results="$work" -f "$awk_file" <"$work/log" >"$work/out" || status=$?
    line=$(tail -n 1 "$work/out")
    if [ "$status" != "$1" ] || [ "$line" != "$2" ] ||
        [ "$(grep -cE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$work/out")" != 1 ]; then
        echo "expected status $1 and \"$2\", got status $status and:"
        cat "$work/out"
        exit 1
    fi
}

# All is well: a Criterion program, a race program, a script, a skipped script.
cat >"$work/test_one.tap" <<END
TAP version 13
1..3
# Criterion v2.4.1
ok - suite::first  (0.00s)
ok - suite::second  # SKIP no such instructions
ok - suite::third  (0.10s)
END
cat >"$work/log" <<END
1: [RUN ] suite::first
1/4 Test #1: base/test_one ....................   Passed    0.02 sec
2: 7 passed, 0 failed
2/4 Test #2: pool/race_two ....................   Passed    0.50 sec
3/4 Test #3: api/exports ......................   Passed    0.02 sec
4/4 Test #4: api/other ........................***Skipped   0.02 sec
END
expect 0 "10 passed, 0 failed, 2 skipped"

# Failed tests, and a race program's own count.
cat >"$work/test_one.tap" <<END
1..3
ok - suite::first  (0.00s)
not ok - suite::second  (0.00s)
  ---
  failures:
  - ok - not a result of its own
  ...
not ok - suite::third unexpected signal after test_one.c:6
END
cat >"$work/log" <<END
1/3 Test #1: base/test_one ....................***Failed    0.02 sec
2: boom
2: 5 passed, 2 failed
2/3 Test #2: pool/race_two ....................***Failed    0.50 sec
3/3 Test #3: api/exports ......................***Failed    0.02 sec
END
expect 1 "6 passed, 5 failed, 0 skipped"
grep -q '^    boom$' "$work/out"

# Programs that died: no TAP file, a cut one, no closing line, a crash after all tests passed.
cat >"$work/test_cut.tap" <<END
1..4
ok - suite::first  (0.00s)
END
cat >"$work/test_leak.tap" <<END
1..1
ok - suite::first  (0.00s)
END
cat >"$work/log" <<END
1/6 Test #1: base/test_none ...................***Exception: SegFault  0.02 sec
2/6 Test #2: base/test_cut ....................***Timeout 900.02 sec
3/6 Test #3: base/test_leak ...................***Failed    0.02 sec
4/6 Test #4: pool/race_two ....................***Exception: SegFault  0.50 sec
5/6 Test #5: pool/race_three ..................   Passed    0.50 sec
6/6 Test #6: base/test_unbuilt ................***Not Run   0.00 sec
END
expect 1 "2 passed, 8 failed, 0 skipped"

# Nothing ran, or nothing passed.
echo "No tests were found!!!" >"$work/log"
expect 1 "0 passed, 0 failed, 0 skipped"
