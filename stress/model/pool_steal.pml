/*
 * pool_steal.pml - shares, range words, job data and the join tree over consecutive jobs, with
 * thieves delayed at every step. Model of pool/pool_range.h, pool_steal.c, pool_tree.c and the
 * seqlock of pool_internal.h.
 *
 * WORKERS workers, JOBS jobs of one phase of ITEMS items in equal shares (equal ranges from job to
 * job, the worst case). Each shared access is one step. The epoch is the phase number modulo
 * EPOCHS: with 1 it never differs, with 2 it comes round within three jobs, as 65536 does for a
 * thief delayed long enough. The join tree has a leaf for each worker's share and a root; with
 * -DFLAT the root alone.
 *
 * Checked: every item runs exactly once, with the data of its own job; job data are not written
 * while a claimed item is not yet counted; an own range is empty when it is put; a thief that finds
 * another sequence after its swap can always take that sequence's data; nobody hangs (an idle
 * worker blocks until there is something for it, so a lost item is an invalid end state).
 *
 *   spin -a pool_steal.pml && cc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m100000
 *   with -DWORKERS=3 -DITEMS=3, -DEPOCHS=1, -DJOBS=2 given to spin for other sizes
 *
 * Must fail: -DNO_RECHECK (the thief does not look at seq after its swap) with EPOCHS 1 or 2: an
 * item runs with the data of an earlier job; -DUNEQUAL -DNO_SEQLOCK (a view is not looked at
 * again): a share is claimed that is not there; -DLATE_RESET (a leaf is put back to 0 after the add
 * to the root): the next job's items are lost; and -DUNEQUAL -DLATE_SIZE (how many items complete a
 * counter is read after the add).
 *
 * Results (spin 6.5.2, all transitions, no errors): defaults 150,944 states; EPOCHS 1 124,601; FLAT
 * 128,636; UNEQUAL 32,499; JOBS 5 617,480; WORKERS 3, ITEMS 4, JOBS 2 11,957,221; WORKERS 3, ITEMS 3,
 * JOBS 3, EPOCHS 1 8,926,119. Those that must fail do, within 300 steps. tests/pool/models.sh runs
 * most of them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef JOBS
#define JOBS 3
#endif
#ifndef ITEMS
#define ITEMS 4
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif

#define STOP 255
#define OPEN(n) ((n) * 2 + 1)
#define CLOSED(n) ((n) * 2)
#define NUMBER(s) ((s) >> 1)
#define IS_OPEN(s) ((s) != STOP && ((s) & 1))

/* With UNEQUAL odd jobs have a single item, worker 0's: the other shares are empty. */
#ifdef UNEQUAL
#define ITEMS_OF(j) (1 + (((j) + 1) % 2) * (ITEMS - 1))
#else
#define ITEMS_OF(j) ITEMS
#endif

/* Share of worker w, rounded up as in numoe_pool_share. */
#define SHARE(items, w) (((items) * (w) + WORKERS - 1) / WORKERS)

byte seq = CLOSED(1);     /* the next number is 1 */
byte data_job, data_items; /* job data; job j has number j */
byte finished[WORKERS + 1];
#define ROOT WORKERS
byte opened[WORKERS];
byte range_begin[WORKERS], range_end[WORKERS], range_epoch[WORKERS]; /* one word */
byte runs[(JOBS + 1) * ITEMS];

/* Something that worker `me` could claim in sequence s. */
#define HAS(v, n)                                                                                  \
    ((opened[v] < (n) && SHARE(ITEMS_OF(n), v) < SHARE(ITEMS_OF(n), (v) + 1)) ||                             \
     (range_begin[v] < range_end[v] && range_epoch[v] == (n) % EPOCHS))
#if WORKERS == 2
#define ANY(n) (HAS(0, n) || HAS(1, n))
#else
#define ANY(n) (HAS(0, n) || HAS(1, n) || HAS(2, n))
#endif

inline load_view(s)
{
    view_job = data_job;
    view_items = data_items;
#ifdef NO_SEQLOCK
    view = s;
#else
    if
    :: seq == s -> view = s
    :: else -> view = 0
    fi
#endif
}

inline claim_share(v)
{
    word = opened[v];
    if
    :: word < NUMBER(view) && SHARE(view_items, v) < SHARE(view_items, (v) + 1) ->
        atomic {
            if
            :: opened[v] == word ->
                opened[v] = NUMBER(view);
                begin = SHARE(view_items, v);
                end = SHARE(view_items, (v) + 1);
                leaf = v;
                got = true
            :: else
            fi
        }
    :: else
    fi
}

/* numoe_pool_leaf_of */
inline find_leaf() {
    leaf = WORKERS - 1;
    do
    :: SHARE(view_items, leaf) > begin -> leaf--
    :: else -> break
    od
}

/* An add to a counter of `size` items; got: it was the last. */
inline add(counter, items, size)
{
    assert(data_job == view_job);
#ifdef LATE_SIZE
    atomic {
        word = finished[counter] + items;
        finished[counter] = word
    }
    got = (word == size);
    word = 0
#else
    atomic {
        finished[counter] = finished[counter] + items;
        assert(finished[counter] <= size);
        got = (finished[counter] == size)
    }
#endif
}

#ifdef LATE_SIZE
#define NOW_ITEMS data_items
#else
#define NOW_ITEMS view_items
#endif
#define LEAF_ITEMS (SHARE(NOW_ITEMS, leaf + 1) - SHARE(NOW_ITEMS, leaf))

/* numoe_pool_join; got: the caller is the phase's finisher. */
inline join()
{
#ifdef FLAT
    add(ROOT, count, NOW_ITEMS);
    if
    :: got -> finished[ROOT] = 0
    :: else
    fi
#else
    add(leaf, count, LEAF_ITEMS);
    if
    :: got ->
#ifndef LATE_RESET
        finished[leaf] = 0;
#endif
        count = SHARE(view_items, leaf + 1) - SHARE(view_items, leaf);
        add(ROOT, count, NOW_ITEMS);
        if
        :: got -> finished[ROOT] = 0
        :: else
        fi
#ifdef LATE_RESET
        ; finished[leaf] = 0
#endif
    :: else
    fi
#endif
}

inline steal(v)
{
    atomic {
        b = range_begin[v];
        e = range_end[v];
        word = range_epoch[v]
    }
    if
    :: b < e && word == NUMBER(view) % EPOCHS ->
        /* Half from the back; anything may have happened since the look. */
        atomic {
            if
            :: range_begin[v] == b && range_end[v] == e && range_epoch[v] == word ->
                begin = e - (e - b - (e - b) / 2);
                end = e;
                range_end[v] = begin;
                got = true
            :: else
            fi
        }
#ifndef NO_RECHECK
        if
        :: got && seq != view ->
            s = seq;
            assert(IS_OPEN(s));
            load_view(s);
            assert(view == s)
        :: else
        fi;
#endif
        if
        :: got -> atomic { find_leaf() }
        :: else
        fi
    :: else
    fi;
    b = 0;
    e = 0
}

inline do_item(item)
{
    assert(data_job == view_job);
    assert(IS_OPEN(seq));
    atomic {
        runs[view_job * ITEMS + (item)]++;
        assert(runs[view_job * ITEMS + (item)] == 1)
    }
    count++
}

/* Until the sequence's number is at least `until`. */
inline participate(until)
{
    do
    :: s = seq;
        if
        :: NUMBER(s) >= until -> break
        :: NUMBER(s) < until && !IS_OPEN(s) -> (seq != s)
        :: NUMBER(s) < until && IS_OPEN(s) ->
            if
            :: view != s -> load_view(s)
            :: else
            fi;
            if
            :: view == s ->
                got = false;
                claim_share(me);
                other = (me + 1) % WORKERS;
                do
                :: !got && other != me ->
                    claim_share(other);
                    if
                    :: !got -> steal(other)
                    :: else
                    fi;
                    other = (other + 1) % WORKERS
                :: else -> break
                od;
                if
                :: got ->
                    count = 0;
                    if
                    :: begin + 1 < end ->
                        atomic {
                            assert(range_begin[me] >= range_end[me]);
                            range_begin[me] = begin + 1;
                            range_end[me] = end;
                            range_epoch[me] = NUMBER(view) % EPOCHS
                        }
                    :: else
                    fi;
                    do_item(begin);
                    do
                    :: atomic {
                            if
                            :: range_begin[me] < range_end[me] ->
                                begin = range_begin[me];
                                range_begin[me] = begin + 1
                            :: else -> break
                            fi
                        }
                        do_item(begin)
                    od;
                    join();
                    d_step {
                        begin = 0;
                        end = 0;
                        count = 0;
                        word = 0;
                        leaf = 0
                    }
                    if
                    :: got -> seq = CLOSED(NUMBER(view) + 1)
                    :: else
                    fi
                :: else ->
                    /* Nothing found: look again when that may change. */
                    (seq != s || ANY(NUMBER(s)))
                fi
            :: else
            fi
        fi
    od
}

proctype worker(byte me)
{
    byte s, view, view_job, view_items, word, begin, end, count, other, b, e, leaf;
    bool got;

    participate(NUMBER(STOP))
}

init {
    /* The caller: submitter and worker 0. */
    byte me, s, view, view_job, view_items, word, begin, end, count, other, job, b, e, leaf;
    bool got;

    atomic {
        job = 1;
        do
        :: job < WORKERS ->
            run worker(job);
            job++
        :: else -> break
        od;
        job = 1
    }
    do
    :: job <= JOBS ->
        data_job = job;
        data_items = ITEMS_OF(job);
        seq = OPEN(job);
        participate(job + 1);
        /* numoe_pool_run has returned: all is done. */
        atomic {
            count = 0;
            do
            :: count < ITEMS_OF(job) ->
                assert(runs[job * ITEMS + count] == 1);
                count++
            :: else -> break
            od;
            count = 0
        }
        job++
    :: else -> break
    od;
    seq = STOP
}
