#!/usr/bin/env bash
# The experiments of results/, from the repository's root: bash results/run.sh ['mqar-seq128-*', or another pattern]
#
# Each trains into runs/<name> and leaves its config.json and summary.json in results/<name>; what is there already is not run
# again, and what was interrupted goes on. On several GPUs start it once for each, with CUDA_VISIBLE_DEVICES and other names.
# With LIST=1 it prints each name with run.py's arguments. TEXT: more arguments of the runs on WikiText, if it is on this machine already, such as
# TEXT='--config.task.source=text/wikitext-2 --config.task.tokenizer=text/gpt2'.
set -euo pipefail
trap : TERM INT  # run.py saves when it gets the signal too; this waits, and ends too, as run.py's exit code is not 0
cd "$(dirname "$0")/.."
only=${1-*}
# Experiments that compile the same program do so once.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR-$PWD/runs/compiled} JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=1

run() {
  local name=$1
  shift
  case $name in $only) ;; *) return 0 ;; esac
  [ -n "${LIST-}" ] && echo "$name $*" && return 0
  [ -f "results/$name/summary.json" ] && return 0
  python3 run.py "$@" --workdir="runs/$name"
  mkdir -p "results/$name"
  cp "runs/$name/config.json" "runs/$name/summary.json" "results/$name/"
}

# What needs the checkpoints of a run that was made here: longer sequences, how input-dependent λ is, whether it finds answers.
analyse() {
  local name=$1 sections=$2 out=runs/$1/analysis table
  case $name in $only) ;; *) return 0 ;; esac
  [ -n "${LIST-}" ] || [ -f "results/$name/lengths.csv" ] || [ ! -d "runs/$name/checkpoints" ] && return 0
  python3 -m loglinear_jax.analysis --sections="$sections" --workdir="runs/$name" --out="$out" "${@:3}"
  for table in lengths looks; do
    [ ! -f "$out/$table-table-$name.csv" ] || cp "$out/$table-table-$name.csv" "results/$name/$table.csv"
    [ ! -f "$out/$table-table-$name.md" ] || cp "$out/$table-table-$name.md" "results/$name/$table.md"
  done
  [ ! -f "$out/lam-dependence-$name.md" ] || cp "$out/lam-dependence-$name.md" "results/$name/lam-dependence.md"
}

paper=fixed,linear,mlp_softmax,mlp_softplus
tf32=--config.train.precision=tf32  # the paper's arithmetic

for kv in 4 8 16 32; do
  run mqar-seq128-kv$kv --config=configs/mqar.py:kv=$kv --config.variants=$paper,rope --config.train.num_seeds=64 $tf32
  run mqar-seq128-released-kv$kv --config=configs/mqar.py:kv=$kv,released --config.variants=linear,mlp_softplus --config.train.num_seeds=64 $tf32
  run mqar-seq128-reference-kv$kv --config=configs/mqar.py:kv=$kv --config.variants=mixer=linear,mixer=softmax --config.train.num_seeds=64 $tf32
  run mqar-seq256-kv$kv --config=configs/mqar.py:kv=$kv,seq=256 --config.variants=$paper --config.train.num_seeds=32 $tf32
  run mqar-seq512-kv$kv --config=configs/mqar.py:kv=$kv,seq=512 --config.variants=$paper --config.train.num_seeds=32 $tf32
done
# The paper's table at its own size: four runs too small to fill a GPU share one. Twice, for what the same seeds give again
# (results/repeatability.md).
for again in '' -again; do
  jobs=()
  for kv in 4 8 16 32; do
    XLA_PYTHON_CLIENT_PREALLOCATE=false run mqar-seq128-five-seeds$again-kv$kv --config=configs/mqar.py:kv=$kv $tf32 &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job"; done  # ends the script if one failed
done
for kv in 4 32; do
  run mqar-128-to-256-kv$kv --config=configs/mqar.py:kv=$kv --config.variants=$paper --config.model.max_length=256 --config.train.num_seeds=32 $tf32
  analyse mqar-128-to-256-kv$kv lengths,dependence
  run mqar-128-to-256-released-kv$kv --config=configs/mqar.py:kv=$kv,released --config.variants=linear,mlp_softplus --config.model.max_length=256 --config.train.num_seeds=32 $tf32
  analyse mqar-128-to-256-released-kv$kv lengths,dependence
done
for again in '' -again -same-bits; do  # results/repeatability.md says how these three differ
  run mqar-d_h-kv8$again --config=configs/mqar.py:kv=8,d_h --config.train.num_seeds=64 $tf32
done

# Why do seeds collapse? One lever at a time, then together.
levers() {
  run collapse-kv$kv-$1 --config=configs/mqar.py:kv=$kv --config.variants=fixed,linear,mlp_softplus --config.train.num_seeds=64 $tf32 "${@:2}"
}
conv=--config.model.conv_width=4
pre=--config.model.norm=pre
qk_norm=--config.model.qk_norm=True
init="--config.model.weight_std=0.125 --config.model.embed_std=1.0"
rate="--config.train.learning_rate=0.003"
schedule="--config.train.warmup_steps=500 --config.train.schedule=cosine"
stream=--config.train.stream=True
dt_max=--config.model.dt_max=0.01
for kv in 4 32; do
  levers conv $conv
  levers pre $pre
  levers qk_norm $qk_norm
  levers init $init
  levers warmup --config.train.warmup_steps=500
  levers lam_slope --config.model.lam_head_slope=1.0
  levers rate $rate
  levers stream $stream
  levers dt_max $dt_max
  levers conv+qk_norm $conv $qk_norm
  levers conv+init $conv $init
  levers conv+pre+qk_norm $conv $pre $qk_norm
  levers conv+qk_norm+dt_max $conv $qk_norm $dt_max
  levers conv+pre+qk_norm+schedule $conv $pre $qk_norm $rate $schedule
  run collapse-released-kv$kv-dt_max --config=configs/mqar.py:kv=$kv,released --config.variants=linear,mlp_softplus --config.train.num_seeds=64 $tf32 $dt_max
done
# The preset robust is conv+pre+qk_norm+dt_max+init; on seeds that it was not chosen on; and without init, for what that adds.
for kv in 4 8 16 32; do
  run mqar-robust-kv$kv --config=configs/mqar.py:kv=$kv,robust --config.variants=$paper --config.train.num_seeds=64 $tf32
  run mqar-robust-reference-kv$kv --config=configs/mqar.py:kv=$kv,robust --config.variants=mixer=linear,mixer=softmax --config.train.num_seeds=64 $tf32
  run mqar-robust-fresh-kv$kv --config=configs/mqar.py:kv=$kv,robust --config.variants=fixed,linear,mlp_softplus --config.train.num_seeds=64 --config.train.first_seed=64 $tf32
  run collapse-kv$kv-conv+pre+qk_norm+dt_max --config=configs/mqar.py:kv=$kv --config.variants=$paper --config.train.num_seeds=64 $tf32 $conv $pre $qk_norm $dt_max
done

run copy-seq256 --config=configs/selective_copy.py --config.variants=$paper --config.train.num_seeds=16 $tf32
run copy-released-seq256 --config=configs/selective_copy.py:released --config.variants=linear,mlp_softplus --config.train.num_seeds=16 $tf32
# Which part of the released code's setting makes the difference: its model, or its vocabulary.
run copy-released-seq256-vocab64 --config=configs/selective_copy.py:released --config.task.vocab_size=64 --config.variants=linear --config.train.num_seeds=16 $tf32
run copy-seq256-vocab128 --config=configs/selective_copy.py --config.task.vocab_size=128 --config.variants=linear --config.train.num_seeds=16 $tf32
run copy-seq512 --config=configs/selective_copy.py:seq=512 --config.variants=$paper --config.train.num_seeds=16 $tf32
run copy-seq1024 --config=configs/selective_copy.py:seq=1024 --config.variants=$paper --config.train.num_seeds=8 $tf32
run copy-released-seq1024 --config=configs/selective_copy.py:seq=1024,released --config.variants=linear,mlp_softplus --config.train.num_seeds=8 $tf32
run copy-robust-seq1024 --config=configs/selective_copy.py:seq=1024,robust --config.variants=fixed,linear,mlp_softplus --config.train.num_seeds=8 $tf32

run wikitext2-hidden256 --config=configs/wikitext2.py:words,hidden=256 --config.variants=$paper --config.train.num_seeds=3 ${TEXT-}
run wikitext2-hidden512 --config=configs/wikitext2.py:words --config.variants=$paper ${TEXT-}
run wikitext2-two-ahead --config=configs/wikitext2.py:words,hidden=256 --config.variants=$paper --config.train.num_seeds=3 --config.task.target_offset=2 ${TEXT-}

# λ that looks into its buckets, on seeds that its form was not chosen on. Every accuracy here is also measured in a test.
looking=content,content_mlp
fresh="--config.train.num_seeds=64 --config.train.first_seed=64"
interleaved=--config=configs/interleaved.py:robust
form=lam=results.content_forms
forms=$form:TokenTemperature,$form:BySize,$form:Gates,$form:SumOf4,$form:SumOfLevels,$form:SumLearned,$form:Normalised,$form:Centred
controls=$form:PlainFrom1,$form:Sharp,$form:Uniform
forgetting="--config=configs/forgetting.py:robust,seq=128,pairs=16,updates=8,state=16 --config.task.vocab_size=128 --config.train.num_train=10000 --config.train.num_steps=4000"
run interleaved $interleaved --config.variants=$paper,$looking,mixer=linear,mixer=softmax $fresh $tf32
run interleaved-128-to-1024 $interleaved --config.model.max_length=1024 --config.variants=$paper,content $fresh $tf32
analyse interleaved-128-to-1024 lengths,looks,lam,rows --longest=4096 --max_seeds=32
run forgetting $forgetting --config.variants=$paper,$looking,mixer=linear,mixer=softmax $fresh $tf32
for state in 8 16 32; do
  for pairs in 12 24; do
    [ $pairs-$state = 24-16 ] || run interleaved-pairs$pairs-state$state $interleaved,pairs=$pairs,state=$state --config.variants=fixed,mlp_softmax,mlp_softplus,content,mixer=linear $fresh $tf32
  done
done
run interleaved-steps10000 $interleaved --config.train.num_steps=10000 --config.variants=$paper,$looking,mixer=linear $fresh $tf32
analyse interleaved-steps10000 lengths --longest=1024
state32="$interleaved,state=32 --config.train.num_steps=10000 --config.train.stop_at=0"
run interleaved-state32-steps10000 $state32 --config.variants=content,mixer=linear $fresh $tf32
analyse interleaved-state32-steps10000 lengths --longest=1024
run interleaved-state32-steps10000-paper $state32 --config.variants=mlp_softmax,fixed $fresh $tf32
analyse interleaved-state32-steps10000-paper lengths --longest=1024
run interleaved-forms $interleaved --config.variants=$forms $fresh $tf32
run interleaved-controls $interleaved --config.variants=$controls $fresh $tf32
run forgetting-forms $forgetting --config.variants=$forms $fresh $tf32
for kv in 4 8 16 32; do
  run mqar-robust-content-kv$kv --config=configs/mqar.py:kv=$kv,robust --config.variants=$looking --config.train.num_seeds=64 $tf32
done
run copy-robust-seq1024-content --config=configs/selective_copy.py:seq=1024,robust --config.variants=content --config.train.num_seeds=8 $tf32
run wikitext2-content --config=configs/wikitext2.py:words,hidden=256 --config.model.max_length=4096 --config.variants=fixed,linear,mlp_softplus,content --config.train.num_seeds=3 ${TEXT-}
analyse wikitext2-content lengths --longest=4096
