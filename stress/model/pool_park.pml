/*
 * pool_park.pml - parking: no lost wake-up, with sleepers that are left asleep on purpose.
 * Model of pool/pool_park.c with the phases of pool_run.c.
 *
 * WORKERS workers, worker 0 being the caller; JOBS jobs of two phases. A phase has 1 or 2 items,
 * which anyone may take, and an arbitrary non-empty set of workers whose shares are not empty: only
 * those are woken. The workers of SPARE (a bit each) are not woken for a phase. With SHORT 1
 * phases are short: nobody is woken for them if anybody is awake. A job is run (worker 0 works) or
 * submitted (the others must do it alone; the caller looks at seq only). With -DLENT the last worker
 * is a thread of the application's (pool/pool_lend.c), which comes and goes LENT times. Futexes are
 * modelled with their own queue and the kernel's comparison. Spin time is arbitrary: a worker may
 * park at any moment when it finds nothing.
 *
 * Checked: no invalid end state (all jobs are done, all threads end), every item is counted,
 * sleepers and absent are right at the end and never negative.
 *
 *   spin -a pool_park.pml && cc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m100000
 *
 * Must fail: -DNO_SECOND_LOOK (a worker does not look at seq again after announcing itself) and
 * -DLATE_ANNOUNCE (it announces itself after that look) hang; with -DLENT=1 also -DNO_LEAVE_LOOK (who
 * leaves does not look at seq again); with -DNO_SOMEBODY nobody may be awake for a submitted job.
 *
 * Results (spin 6.5.2, all transitions, no errors): WORKERS 2, JOBS 3 204,975 states; WORKERS 3,
 * JOBS 1 5,044,114; WORKERS 3, JOBS 2 (the defaults) 23,871,444; WORKERS 3, JOBS 1, LENT 1 6,804,766.
 * Those that must fail do, within 150 steps. tests/pool/models.sh runs most of them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef WORKERS
#define WORKERS 3
#endif
#ifndef JOBS
#define JOBS 2
#endif
#ifndef SPARE
#define SPARE 0
#endif
#ifndef SHORT
#define SHORT 0
#endif

#define STOP 255
#define IS_OPEN(s) ((s) != STOP && ((s) & 1))
#define NUMBER(s) ((s) >> 1)

byte seq;                  /* number * 2 + open; job j has phases 2j and 2j + 1 */
byte left, counted, total; /* items of the phase: unclaimed, done, all */
byte need;                 /* workers with a share, a bit each */
bool submitted;
byte sleepers, wanted, absent;
bool sleeping[WORKERS];    /* state */
byte spare = SPARE;        /* who is, a bit each; worker 0 never */
bool queued[WORKERS];      /* in the kernel's queue */
byte done;

/* The two counters in one step: no one reads both. */
inline leave_list(w)
{
    d_step {
        assert(sleepers > 0);
        sleepers--;
        if
        :: spare & (1 << w)
        :: else -> assert(wanted > 0); wanted--
        fi
    }
}

inline wake_one(w)
{
    atomic {
        if
        :: sleeping[w] -> sleeping[w] = false; hit = true
        :: else -> hit = false
        fi
    }
    if
    :: hit ->
        leave_list(w);
        queued[w] = false
    :: else
    fi
}

/* awake(): two loads. */
inline count_awake()
{
    up = WORKERS - sleepers;
    up = up - absent
}

/* numoe_pool_wake: in any order of the tree, here by number. */
inline wake_needed()
{
#ifndef NO_SOMEBODY
    w = 1;
    do
    :: submitted && w < WORKERS ->
        count_awake();
        if
        :: up < 2 -> wake_one(w); w++
        :: else -> break
        fi
    :: else -> break
    od;
#endif
    w = 0;
    do
    :: w < WORKERS ->
        if
        :: SHORT && WORKERS - sleepers - absent >= 1 + submitted -> break
        :: !SHORT && ((submitted && sleepers == 0) || (!submitted && wanted == 0)) -> break
        :: else
        fi;
        if
        :: (need & (1 << w)) && !(spare & (1 << w)) -> wake_one(w)
        :: else
        fi;
        w++
    :: else -> break
    od;
    w = 0;
    up = 0;
    hit = false
}

/* Publish a phase with any items and shares. One step: which items belong to which phase is the
 * matter of pool_steal.pml. */
inline publish(next)
{
    atomic {
        if
        :: total = 1
        :: total = 2
        fi;
        counted = 0;
        left = total;
        select(need : 1 .. (1 << WORKERS) - 1);
        seq = next
    }
}

inline join_list()
{
    d_step {
        sleepers++;
        if
        :: spare & (1 << me)
        :: else -> wanted++
        fi
    }
}

inline park(s)
{
#ifdef LATE_ANNOUNCE
    if
    :: seq == s ->
        join_list();
        sleeping[me] = true;
#else
    join_list();
    sleeping[me] = true;
    if
#ifdef NO_SECOND_LOOK
    :: true ->
#else
    :: seq == s ->
#endif
#endif
        do
        :: atomic { queued[me] = sleeping[me] }
            (!queued[me]);
            if
            :: !sleeping[me] -> break
            :: else
            fi
        od
#ifndef NO_SECOND_LOOK
    :: else ->
#ifndef LATE_ANNOUNCE
        atomic {
            if
            :: sleeping[me] -> sleeping[me] = false; hit = true
            :: else -> hit = false
            fi
        }
        if
        :: hit -> leave_list(me)
        :: else
        fi;
        hit = false
#else
        skip
#endif
#endif
    fi
}

inline participate(until, may_leave)
{
    left_pool = false;
    do
    :: s = seq;
        if
        :: NUMBER(s) >= until -> break
        :: else
        fi;
        got = false;
        atomic {
            if
            :: IS_OPEN(s) && seq == s && left > 0 -> left--; got = true
            :: else
            fi
        }
        if
        :: got ->
            /* The item runs; then it is counted. */
            atomic {
                counted++;
                got = (counted == total)
            }
            if
            :: got && NUMBER(s) % 2 == 0 ->
                publish(s + 2);
                wake_needed()
            :: got && NUMBER(s) % 2 == 1 ->
                done++;
                seq = s + 1;
                /* numoe_pool_wake_caller */
                if
                :: sleeping[0] -> wake_one(0)
                :: else
                fi;
                hit = false
            :: else
            fi;
            got = false
        :: else ->
            if
            :: (seq != s || (IS_OPEN(s) && left > 0)) /* spinning */
            :: park(s)
            :: may_leave -> /* numoe_pool_go_absent */
                absent++;
                if
#ifdef NO_LEAVE_LOOK
                :: true -> left_pool = true
#else
                :: seq == s -> left_pool = true
                :: else -> d_step { assert(absent > 0); absent-- }
#endif
                fi;
                if
                :: left_pool -> break
                :: else
                fi
            fi
        fi
    od
}

proctype worker(byte me)
{
    byte s, w, up;
    bool got, hit, left_pool;

    participate(NUMBER(STOP), false)
}

#ifdef LENT
proctype lent(byte me)
{
    byte s, w, up, times;
    bool got, hit, left_pool;

    do
    :: times < LENT && seq != STOP ->
        times++;
        d_step { assert(absent > 0); absent-- }
        participate(NUMBER(STOP), true)
    :: true -> break
    od
}
#endif

init {
    byte me, s, w, up, job;
    bool got, hit, left_pool;

    atomic {
        w = 1;
#ifdef LENT
        absent = 1;
        run lent(WORKERS - 1);
#define OWN (WORKERS - 1)
#else
#define OWN WORKERS
#endif
        do
        :: w < OWN ->
            run worker(w);
            w++
        :: else -> break
        od;
        w = 0
    }
    do
    :: job < JOBS ->
        if
        :: submitted = false
        :: submitted = true
        fi;
        publish(job * 4 + 1);
        wake_needed();
        if
        :: submitted -> (NUMBER(seq) >= job * 2 + 2) /* the others alone */
        :: true -> participate(job * 2 + 2, false)   /* run, or wait */
        fi;
        assert(done == job + 1);
        job++
    :: else -> break
    od;
    seq = STOP;
    w = 0;
    do
    :: w < WORKERS -> wake_one(w); w++
    :: else -> break
    od;
    (_nr_pr == 1);
    assert(sleepers == 0 && wanted == 0 && absent <= 1)
}
