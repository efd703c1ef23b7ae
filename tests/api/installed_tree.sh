#!/bin/sh
# installed_tree.sh CMAKE CC SOURCE BUILD LIBDIR: install into a scratch prefix, move it, and build
# the examples against it, that of the README by pkg-config and by CMake.
set -eu
cmake=$1 cc=$2 source=$3 build=$4 libdir=$5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/first" >"$work/log" || { cat "$work/log"; exit 1; }
mv "$work/first" "$work/prefix"

PKG_CONFIG_PATH=$work/prefix/$libdir/pkgconfig
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
"$cc" -std=c11 -pedantic -Wall -Wextra -Werror $(pkg-config --cflags numoe) \
    "$source/docs/example.c" -o "$work/example" $(pkg-config --libs numoe)

# shellcheck disable=SC2046
"$cc" -std=c11 -pedantic -Wall -Wextra -Werror $(pkg-config --cflags numoe) \
    "$source/docs/example_pieces.c" -o "$work/pieces" $(pkg-config --libs numoe)

mkdir "$work/project"
cat >"$work/project/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES C)
find_package(numoe 0.1 REQUIRED)
add_executable(consumer $source/docs/example.c)
target_link_libraries(consumer PRIVATE numoe::numoe)
END
{ CC=$cc "$cmake" -S "$work/project" -B "$work/out" -G Ninja "-DCMAKE_PREFIX_PATH=$work/prefix" &&
    "$cmake" --build "$work/out"; } >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

# All programs find the library and say what is missing.
for program in "$work/example" "$work/pieces" "$work/out/consumer"; do
    status=0
    LD_LIBRARY_PATH=$work/prefix/$libdir "$program" "$work/no-such-checkpoint" \
        >"$work/out.txt" 2>"$work/err.txt" || status=$?
    if [ "$status" != 1 ] || ! grep -q no-such-checkpoint "$work/err.txt"; then
        echo "$program: status $status"
        cat "$work/err.txt"
        exit 1
    fi
done
"$work/prefix/bin/numoe" synth --model v4-flash --layers 1 --experts 2 "$work/checkpoint" >"$work/log"
LD_LIBRARY_PATH=$work/prefix/$libdir "$work/example" "$work/checkpoint" | grep -q '^y\[0\] = -*[0-9]'
LD_LIBRARY_PATH=$work/prefix/$libdir "$work/pieces" "$work/checkpoint" |
    grep -Eq '^the CPU computes: .+|^.+: [1-9][0-9]* pieces of layer 0$'
test "$("$work/prefix/bin/numoe" version | head -n 1)" = "numoe $(pkg-config --modversion numoe)"
