#!/usr/bin/env bash
# After the experiments, from the repository's root: bash results/analyse.sh ['interleaved*', or another pattern]
#
# What needs the checkpoints of runs that were made here (runs/NAME, by loglinear_jax sweep results/STUDY/grid.toml): longer sequences,
# how input-dependent λ is, whether it finds answers. The tables go beside the run's record; what is there is not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
only=${1-*}

analyse() {
  local kept=results/$1/runs/$2 name=$2 sections=$3 out=runs/$2/analysis
  case $name in $only) ;; *) return 0 ;; esac
  [ -f "$kept-lengths.csv" ] || [ -f "$kept-lam-dependence.md" ] || [ ! -d "runs/$name" ] && return 0
  loglinear_jax analyze --sections="$sections" --workdir="runs/$name" --out="$out" "${@:4}"
  [ ! -f "$out/lengths-table-$name.csv" ] || cp "$out/lengths-table-$name.csv" "$kept-lengths.csv"
  [ ! -f "$out/looks-table-$name.csv" ] || cp "$out/looks-table-$name.csv" "$kept-looks.csv"
  [ ! -f "$out/looks-table-$name.md" ] || cp "$out/looks-table-$name.md" "$kept-looks.md"
  [ ! -f "$out/lam-dependence-$name.md" ] || cp "$out/lam-dependence-$name.md" "$kept-lam-dependence.md"
}

for kv in 4 32; do
  analyse mqar mqar-128-to-256-kv$kv lengths,dependence
  analyse mqar mqar-128-to-256-released-kv$kv lengths,dependence
done
for kv in 16 32; do
  analyse mqar mqar-profiles-kv$kv dependence
done
analyse copying copy-profiles-seq256 dependence
by_seed=runs/copy-profiles-seq256/analysis/lam-dependence-copy-profiles-seq256.csv
kept_by_seed=results/copying/runs/copy-profiles-seq256-lam.csv # what the page's counts need
[ -f $kept_by_seed ] || [ ! -f $by_seed ] || cut -d, -f1,2,4-8,12,15,16 $by_seed > $kept_by_seed
analyse interleaved interleaved-128-to-1024 lengths,looks,lam,rows --longest=4096 --max_seeds=32
analyse interleaved interleaved-steps10000 lengths --longest=1024
analyse interleaved interleaved-state32-steps10000 lengths --longest=1024
analyse interleaved interleaved-state32-steps10000-paper lengths --longest=1024
analyse tracking tracking-parity lengths --longest=160
analyse wikitext2 wikitext2-content lengths --longest=4096

# Losses of language models on the first tokens of the test documents, 16,384 or as many as the last argument says: a row for
# each seed and group of tokens, a column for each variant.
documents() {
  local kept=results/$1/runs/$2-documents${5:+-$5}.csv name=$2 run out=runs/$2-documents${5:+-$5}
  case $name in $only) ;; *) return 0 ;; esac
  [ -f "$kept" ] && return 0
  for run in $3; do [ -d "$run" ] || return 0; done
  # shellcheck disable=SC2086
  loglinear_jax evaluate $3 --model_seed="$4" --extend_lam --length="${5:-16384}" --out="$out"
  cp "$out/seeds.csv" "$kept"
}

documents books books-pair runs/books-pair all
documents books books-time runs/books-time all
documents books books-longer-seed0 runs/books-longer-seed0 all
documents books books-longer-seed4 runs/books-longer-seed4 all
documents books books-controls 'runs/books-fixed runs/books-wide' 0,1,2
documents books books-fixed-more runs/books-fixed-more all
documents books books-wide-more runs/books-wide-more all
documents books books-lam runs/books-lam all
for run in delta delta-more delta-levels delta-levels-more; do
  documents books books-$run runs/books-$run all
done
for run in gated-delta softmax; do
  documents books books-$run runs/books-$run all
  documents books books-$run runs/books-$run all 4096
done
