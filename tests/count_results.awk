# Reads what `ctest --verbose` prints; shows one line for each test program, all that a failed one
# printed, and at the end adds up the results:
#   test_*  Criterion programs, by their TAP files in the folder `results`
#   race_*  by their closing line "N passed, N failed"
#   gpu_*   by theirs, "N passed, N failed, N skipped"
#   others  one each
# A program that crashed, leaked, timed out or left tests unfinished counts as failed at least once.
# Fails unless something passed and nothing failed.
function tap(file, text, seen, plan, bad) {
    seen = plan = bad = 0
    while ((getline text < file) > 0) {
        if (text ~ /^1\.\.[0-9]+$/)
            plan = substr(text, 4) + 0
        else if (text ~ /^ok - .*# SKIP/) { skipped++; seen++ }
        else if (text ~ /^ok - /) { passed++; seen++ }
        else if (text ~ /^not ok - /) { bad++; seen++ }
    }
    close(file)
    # Tests that were planned and left no line never finished.
    if (plan > seen)
        bad += plan - seen
    if (seen == 0)
        bad++
    return bad
}
match($0, /^[0-9]+: /) {
    id = substr($0, 1, RLENGTH - 2)
    text = substr($0, RLENGTH + 1)
    # Of Criterion's own lines, those about tests that went well are left out.
    if (text !~ /^\[(RUN |PASS)\] /)
        output[id] = output[id] "    " text "\n"
    if (text ~ /^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$/)
        closing[id] = text
    next
}
/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / {
    line = $0
    sub(/^ *[0-9]+\/[0-9]+ Test +#/, "", line)
    id = line
    sub(/:.*/, "", id)
    name = line
    sub(/^[0-9]+: /, "", name)
    sub(/ .*/, "", name)
    unit = name
    sub(/.*\//, "", unit)
    ok = line ~ / Passed +[0-9.]+ sec/
    bad = 0
    if (unit ~ /^test_/) {
        bad = tap(results "/" unit ".tap")
    } else if (unit ~ /^(race|gpu)_/ && closing[id] != "") {
        split(closing[id], word, " ")
        passed += word[1]
        bad = word[3] + 0
        skipped += word[5]
    } else if (line ~ /\*\*\*Skipped/) {
        skipped++
        ok = 1
    } else if (ok) {
        if (unit ~ /^(race|gpu)_/)
            bad = 1
        else
            passed++
    }
    # The program as a whole went wrong: crash, leak, time out.
    if (!ok && !bad)
        bad = 1
    failed += bad
    sub(/^[0-9]+: [^ ]+ \.* */, "", line)
    printf "  %-40s %s\n", name, line
    if (bad || !ok)
        printf "%s", output[id]
    fflush()
    delete output[id]
}
END {
    printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
    exit !(failed == 0 && passed > 0)
}
