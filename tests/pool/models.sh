#!/bin/sh
# models.sh SOURCE: check the models of the pool's protocols with spin: what must hold does, over all
# interleavings, and what must fail does. Exit status 77: spin is not installed.
set -eu
models=$1/stress/model
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

command -v spin >/dev/null || { echo "spin is not installed"; exit 77; }
cd "$work"

# explore MODEL [DEFINITION]...: leaves in $errors how many errors were found (0 or 1)
explore() {
    model=$1
    shift
    rm -f pan*
    spin -a "$@" "$models/$model.pml" >spin.log 2>&1 || { cat spin.log; exit 1; }
    "${CC:-cc}" -O2 -w -DSAFETY -DCOLLAPSE -o pan pan.c
    ./pan -m200000 >pan.log
    grep -q 'max search depth too small' pan.log && { echo "$model $*: cut off"; exit 1; }
    errors=$(sed -n 's/^State-vector.*errors: //p' pan.log)
    echo "$model $*: $(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log) states, $errors errors"
}

holds() {
    explore "$@"
    [ "$errors" = 0 ] || { cat pan.log; exit 1; }
}

fails() {
    explore "$@"
    [ "$errors" = 1 ] || { echo "must fail"; exit 1; }
}

# Consecutive jobs, thieves delayed at every step, epochs that come round.
holds pool_steal
holds pool_steal -DEPOCHS=1
holds pool_steal -DFLAT
holds pool_steal -DUNEQUAL
holds pool_steal -DWORKERS=3 -DITEMS=4 -DJOBS=2
fails pool_steal -DNO_RECHECK -DEPOCHS=1
fails pool_steal -DNO_RECHECK
fails pool_steal -DUNEQUAL -DNO_SEQLOCK
fails pool_steal -DLATE_RESET
fails pool_steal -DUNEQUAL -DLATE_SIZE

# Sleepers against wakers.
holds pool_park -DWORKERS=2 -DJOBS=3
holds pool_park -DWORKERS=2 -DJOBS=3 -DSPARE=2
holds pool_park -DWORKERS=2 -DJOBS=3 -DSHORT=1
holds pool_park -DWORKERS=3 -DJOBS=1 -DSPARE=4
fails pool_park -DWORKERS=2 -DNO_SECOND_LOOK
fails pool_park -DWORKERS=2 -DLATE_ANNOUNCE
fails pool_park -DWORKERS=2 -DNO_SOMEBODY

# A lent thread that comes and goes.
holds pool_park -DWORKERS=3 -DJOBS=1 -DLENT=1
fails pool_park -DWORKERS=3 -DJOBS=1 -DLENT=1 -DNO_LEAVE_LOOK
