import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

export default defineConfig({
  plugins: [svelte()],
  build: {
    outDir: "../src/r1_cli/runs/view/static",
    emptyOutDir: true,
    assetsInlineLimit: 0, // the page's policy allows no inline script
    modulePreload: false,
  },
});
