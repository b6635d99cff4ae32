#!/usr/bin/env bash
# Checks the native kernels on a machine with one NVIDIA GPU, in less than 8 minutes: builds the library, runs 2 and 4
# workers as processes on the one GPU, compares with the oracle, then takes times. Nothing is fetched; it needs python3
# with JAX >= 0.11.2 for CUDA, optax and NumPy, CMake and g++.
#
#   tests/gpu/check.sh [--dry-run] [--out FOLDER]
#
# Each part ends with a line "PASS part", "FAIL part" or "NOT RUN part (why)"; results.json has all parts and figures.
# The exit status is 0 if no part failed. --dry-run takes the same way on the CPU: with lax.ppermute, at small sizes.

set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}"
budget_s=460  # of the 8 minutes, some are for the end
dry_run=false
out=""

while (($#)); do
  case "$1" in
    --dry-run) dry_run=true ;;
    --out) shift; out="${1:?--out needs a folder}" ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "check.sh: unknown argument $1 (--help)" >&2; exit 2 ;;
  esac
  shift
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
out="${out:-${OUT:-$work/out}}"
mkdir -p "$out"
parts="$out/parts.txt"
: > "$parts"
failed=0
SECONDS=0

finish() {  # finish PASS|FAIL|"NOT RUN" part seconds [why]
  echo "$1 $2${4:+ ($4)}"
  printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "${4:-}" >> "$parts"
  [[ "$1" != FAIL ]] || failed=1
}

# part NAME SECONDS COMMAND..: within its own limit and what is left of all. Exit status 77 is "not run", and the last
# line of the output says why.
part() {
  local name="$1" limit="$2" left=$((budget_s - SECONDS)) start=$SECONDS status
  shift 2
  ((limit <= left)) || limit=$left
  if ((limit < 10)); then
    finish "NOT RUN" "$name" 0 "no time left"
    return 1
  fi
  echo "--- $name"
  # `timeout` runs programs, no functions of this shell.
  if declare -F "$1" > /dev/null; then set -- bash -c "$1"; fi
  timeout --kill-after=5 "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  case $status in
    0) tail -n 12 "$out/$name.log"; finish PASS "$name" $((SECONDS - start)) ;;
    77) finish "NOT RUN" "$name" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log")" ;;
    124 | 137) tail -n 30 "$out/$name.log"; finish FAIL "$name" $((SECONDS - start)) "took longer than $limit s" ;;
    *) tail -n 60 "$out/$name.log"; finish FAIL "$name" $((SECONDS - start)) "exit status $status" ;;
  esac
  return $status
}

describe() {
  uname -srm
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null || $dry_run ||
    { echo "no NVIDIA GPU"; return 77; }
  "$python" - << 'EOF'
import importlib.metadata as metadata
import sys

print("python", sys.version.split()[0])
for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "optax", "numpy", "nvidia-nccl-cu13",
             "nvidia-nccl-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
EOF
}

# As users install it; or, where the build's own tools are missing, with CMake alone.
build() {
  if "$python" -m pip install -v --no-index --no-deps --no-build-isolation --target "$work/site" "$repository"; then
    ls "$work/site/jax_skipreduce/skipreduce_ffi.so" && return 0
  fi
  echo "pip built no library: with CMake"
  rm -rf "$work/site"
  cmake -S "$repository/xla_ffi" -B "$work/build" -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build "$work/build" -j "$(nproc)" && mkdir -p "$work/site" &&
    cp -r "$repository/jax_skipreduce" "$work/site/" && cp "$work/build/skipreduce_ffi.so" "$work/site/jax_skipreduce/"
}

load() {
  "$python" -c "import jax_skipreduce as sr; print(sr.__file__); print(sr.native_info())"
}

export -f describe build load
export python repository work dry_run

part environment 30 describe
can_run=$?

if $dry_run; then
  export PYTHONPATH="$repository:$repository/tests/gpu${PYTHONPATH:+:$PYTHONPATH}" JAX_PLATFORMS=cpu
  for name in build load sanitizer time_limit; do finish "NOT RUN" "$name" 0 "dry run"; done
  launch=("$python" "$here/launch.py" --dry-run)
  part correct_2_xla 60 "${launch[@]}" --workers 2 --json "$out/correct_2_xla.json" correct
  part timing_2 60 "${launch[@]}" --workers 2 --json "$out/timing_2.json" timing
elif ((can_run != 0)); then
  for name in build load correct timing sanitizer time_limit; do finish "NOT RUN" "$name" 0 "no GPU"; done
else
  # The built package comes first, and of the repository only the tests' oracle is used.
  export PYTHONPATH="$work/site:$repository/tests/gpu${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
  cd "$work"
  if part build 120 build && part load 45 load; then
    launch=("$python" "$here/launch.py")
    for workers in 2 4; do
      for algorithm in host ring direct; do
        part "correct_${workers}_$algorithm" 60 "${launch[@]}" --workers $workers --algorithm $algorithm \
          --json "$out/correct_${workers}_$algorithm.json" correct
      done
      if ((workers == 2)); then
        for algorithm in host ring direct; do
          part "timing_${workers}_$algorithm" 60 "${launch[@]}" --workers $workers --algorithm $algorithm \
            --json "$out/timing_${workers}_$algorithm.json" timing
        done
        part time_limit 45 "${launch[@]}" --workers 2 --algorithm ring time_limit
        part sanitizer 75 "${launch[@]}" --workers 2 --algorithm ring --sanitizer small
      fi
    done
    for algorithm in host ring direct; do
      part "timing_4_$algorithm" 60 "${launch[@]}" --workers 4 --algorithm $algorithm \
        --json "$out/timing_4_$algorithm.json" timing
    done
  else
    for name in correct timing sanitizer time_limit; do finish "NOT RUN" "$name" 0 "the library was not built"; done
  fi
fi

"$python" - "$out" << 'EOF'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
rows = [line.split("\t") for line in (out / "parts.txt").read_text().splitlines()]
results = {
    "environment": (out / "environment.log").read_text().splitlines(),
    "parts": [{"part": part, "result": result, "seconds": int(s), "why": why} for result, part, s, why in rows],
    "figures": {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*_*.json"))},
}
(out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
print(out / "results.json")
EOF
exit $failed
