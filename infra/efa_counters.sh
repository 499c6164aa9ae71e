# One look at the counters of all EFA interfaces: those of /sys/class/infiniband, in Prometheus' text form. POSIX sh.
#   SYS=/sys OUT=/tmp/efa.prom sh infra/efa_counters.sh
for name in $(ls "$SYS"/class/infiniband/*/ports/*/hw_counters 2>/dev/null | grep -E '^[a-z_]+$' | sort -u); do
  if [ "$name" = lifespan ]; then continue; fi # how old a counter may be, in milliseconds: none itself
  echo "# TYPE efa_${name}_total counter"
  for file in "$SYS"/class/infiniband/*/ports/*/hw_counters/"$name"; do
    port=${file%/hw_counters/*} device=${file%/ports/*}
    echo "efa_${name}_total{device=\"${device##*/}\",port=\"${port##*/}\"} $(cat "$file")"
  done
done >"$OUT.new"
mv "$OUT.new" "$OUT" # whole, whenever it is read
