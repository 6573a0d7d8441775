#!/usr/bin/env bash
# After the experiments, from the repository's root: bash results/analyse.sh ['interleaved*', or another pattern]
#
# What needs the checkpoints of runs that were made here (runs/NAME, by loglinear_jax sweep results/experiments.toml): longer
# sequences, how input-dependent λ is, whether it finds answers. The tables go to results/NAME; what is there is not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
only=${1-*}

analyse() {
  local name=$1 sections=$2 out=runs/$1/analysis table
  case $name in $only) ;; *) return 0 ;; esac
  [ -f "results/$name/lengths.csv" ] || [ ! -d "runs/$name/checkpoints" ] && return 0
  python3 -m loglinear_jax.analysis --sections="$sections" --workdir="runs/$name" --out="$out" "${@:3}"
  for table in lengths looks; do
    [ ! -f "$out/$table-table-$name.csv" ] || cp "$out/$table-table-$name.csv" "results/$name/$table.csv"
    [ ! -f "$out/$table-table-$name.md" ] || cp "$out/$table-table-$name.md" "results/$name/$table.md"
  done
  [ ! -f "$out/lam-dependence-$name.md" ] || cp "$out/lam-dependence-$name.md" "results/$name/lam-dependence.md"
}

for kv in 4 32; do
  analyse mqar-128-to-256-kv$kv lengths,dependence
  analyse mqar-128-to-256-released-kv$kv lengths,dependence
done
analyse interleaved-128-to-1024 lengths,looks,lam,rows --longest=4096 --max_seeds=32
analyse interleaved-steps10000 lengths --longest=1024
analyse interleaved-state32-steps10000 lengths --longest=1024
analyse interleaved-state32-steps10000-paper lengths --longest=1024
analyse tracking-parity lengths --longest=160
analyse wikitext2-content lengths --longest=4096
